"""Fast paths of single operations: contract, fp32 reference, kernel, benchmark and test under one name each."""
