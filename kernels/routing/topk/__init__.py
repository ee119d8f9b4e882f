"""Choice and weights of a router: definition, limits of its kernel, custom ops."""
