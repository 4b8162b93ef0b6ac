"""Any model as a subject: find its heads, gate them, read their outputs, and remove them."""
