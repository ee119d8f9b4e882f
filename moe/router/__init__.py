"""The router: logits, scores, top-k, balance."""
