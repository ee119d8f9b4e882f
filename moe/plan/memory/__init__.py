"""Memory of a rank of each pipeline stage."""
