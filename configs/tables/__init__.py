"""Tables from which valid values, documentation, estimates and implementations derive."""
