"""What is kept in files: run folders, the cache, checksums, who holds what."""
