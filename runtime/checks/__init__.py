"""Every refusal: whether a plan can be carried out here."""
