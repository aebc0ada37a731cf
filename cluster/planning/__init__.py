"""How a fleet would behave: workloads, routing policies and a discrete-event simulation of replicas. No Ray, no torch."""
