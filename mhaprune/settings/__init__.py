"""What settings mean, which values they take, and how a person is told."""
