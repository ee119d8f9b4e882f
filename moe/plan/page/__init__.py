"""Page of a dry run."""
