"""What a TrainingGraph costs: FLOPs and bytes of every operator, devices, the least time on one, and MFU and HFU.

In: a TrainingGraph and a Device. Out: NodeCosts, a Roofline, a Utilisation. Conventions: docs/cost.md. Nothing is imported here:
the table of devices is read before torch is loaded.
"""
