"""Speed of the adapters inside the models of their frameworks."""
