"""The transformer of this project: one layer of attention, the network around it, and the network as a `Subject`."""
