"""What runs on a schedule, is read, or is decided by people: purge, sweep, counts, and the resolution of records."""
