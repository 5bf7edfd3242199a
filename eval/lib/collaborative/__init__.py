"""What the collaborative tables share."""
