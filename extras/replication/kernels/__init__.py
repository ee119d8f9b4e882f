"""Expert replication: the expert MLP with replicas, and what ranks exchange for them."""
