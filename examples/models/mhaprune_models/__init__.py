"""Models whose heads are known: by construction, from a publication, or by exact patching."""
