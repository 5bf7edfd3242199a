"""Sets of questions, and whether answers are right."""
