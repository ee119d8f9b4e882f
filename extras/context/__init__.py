"""Context parallelism: what ranks that share sequences exchange."""
