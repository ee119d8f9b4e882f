"""Who is at fault when a job fails, and how all of its ranks end in time."""
