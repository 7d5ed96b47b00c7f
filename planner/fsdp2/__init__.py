"""Plans for FSDP2: which modules it gathers together, what it keeps and how far it fetches ahead. Torch-free."""
