"""What runs at the coordinator: the federation over a transport, and the rules for silos that are lost."""
