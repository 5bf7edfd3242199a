"""Several models write together (CoS): combinations, proposers, verification."""
