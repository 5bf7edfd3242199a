"""Read sets of questions, and judge whether answers are right."""
