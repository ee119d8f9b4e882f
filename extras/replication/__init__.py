"""Expert replication: copies of hot experts on other ranks, for one micro-batch."""
