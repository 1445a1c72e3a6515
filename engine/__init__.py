"""From a request to frames: one file a step, in the order in which data flows."""
