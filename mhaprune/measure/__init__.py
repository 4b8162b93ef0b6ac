"""Loss and quality under gates, the columns of tables that hold them, and times."""
