"""Data sets that come with Shoal: text files, and the standard library's sources."""
