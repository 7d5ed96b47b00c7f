"""An emulated cluster on one machine: hosts as network namespaces, each host's egress shaped to a rate.

emulation.py: what is emulated, from text; namespaces.py: namespaces without a name; wiring.py: bridge, links, rates;
hosts.py: where ranks run.
"""
