"""Plans for FSDP2: wrapping by its public calls, overlap on hosts without accelerators, and a record of collectives."""
