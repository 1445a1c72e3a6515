"""LayerNorm and modulation in one pass, alone or after a gated residual."""
