"""Process groups, nodes, communicators and collectives."""
