"""The sentence encoder MiniLM as an option of mhaprune: `model=minilm`."""
