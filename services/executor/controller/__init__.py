"""The adaptive controller: measures the engine, asks the planner, carries its plans out."""
