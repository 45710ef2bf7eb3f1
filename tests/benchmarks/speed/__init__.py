"""What compare.py and scaling.py are made of; what the peer's Python runs too imports nothing of this project."""
