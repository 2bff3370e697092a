"""The folder of one output while it is written and afterwards: its files, its journal, its record."""
