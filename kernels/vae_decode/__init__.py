"""Wan 2.2's decoder with fewer operations than direct convolution: protocol, reference, passes, plan, bench."""
