"""Any model as a subject: its heads are found, gated, captured and cut."""
