"""How few heads are enough, chosen how, and with what done afterwards."""
