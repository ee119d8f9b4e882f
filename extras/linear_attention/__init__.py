"""Linear attention: the gated delta rule and what stands around it in a layer."""
