"""Records of profile.json, cluster.json and the catalogue. Imports no torch."""
