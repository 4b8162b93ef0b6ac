"""What is studied: one file per experiment."""
