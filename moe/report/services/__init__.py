"""Services that get the numbers of a run: each a small class over `service.Service`."""
