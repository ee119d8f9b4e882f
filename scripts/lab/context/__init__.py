"""Context parallelism: balance of documents over ranks, and exchanges beside ring attention."""
