"""From the experts of tokens to rows in expert order, and their form on the wire."""
