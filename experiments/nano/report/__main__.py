from experiments.nano.report.sections import main

raise SystemExit(main())
