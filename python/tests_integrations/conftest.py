import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for snippets.py
sys.path.append(str(Path(__file__).parents[1] / "tests"))  # for ranks.py
