"""profile.json, cluster.json and the catalogue as records. Imports no torch."""
