"""An emulated cluster on one machine: hosts as network namespaces, each host's egress shaped to a rate.

hosts.py: what is emulated, and where ranks run; namespaces.py: namespaces without a name; wiring.py: bridge, links,
rates; pacing.py: connections held to a rate without root, and without hosts.
"""
