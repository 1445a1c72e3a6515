"""RMSNorm per head and rotary positions of queries and keys, video and text, in one pass over their products."""
