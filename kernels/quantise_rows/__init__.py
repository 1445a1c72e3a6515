"""Rows to fp8 (e4m3) with a scale each, for products on the tensor cores."""
