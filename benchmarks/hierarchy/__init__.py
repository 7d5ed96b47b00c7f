"""Collectives on two kinds of link, on emulated hosts: messages, bytes between hosts, accuracy."""
