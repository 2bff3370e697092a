"""Finds the smallest checkpoint that passes the gates: tries, screens, certifies on other items, writes its recipe."""
