"""Let several models write together (CoS): combinations, proposers, verification."""
