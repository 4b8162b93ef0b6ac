"""Files: run folders, the cache, checksums, locks."""
