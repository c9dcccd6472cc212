// What Grafana's published types say of a dashboard, as JSON: an enum's member is its value, and each kind of panel has
// the options of its own plugin. Only kinds that are listed here can be used; what the Prometheus plugin adds to a query
// is not published, and is written down below.
import type { AnnotationQuery, Dashboard, DataQuery, FieldConfigSource, Panel, RowPanel } from '@grafana/schema';
import type {
  FieldConfig as HeatmapFieldConfig,
  Options as HeatmapOptions,
} from '@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen';
import type { Options as StatOptions } from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type {
  FieldConfig as TableFieldConfig,
  Options as TableOptions,
} from '@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen';
import type {
  FieldConfig as TimeSeriesFieldConfig,
  Options as TimeSeriesOptions,
} from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';

type Json<T> = T extends string
  ? `${T}`
  : T extends number
    ? T
    : T extends Array<infer Member>
      ? Array<Json<Member>>
      : T extends object
        ? { [Key in keyof T]: Json<T[Key]> }
        : T;

interface PrometheusQuery extends DataQuery {
  datasource: { type: 'prometheus'; uid: '${datasource}' };
  editorMode: 'code';
  expr: string;
  format: 'time_series' | 'table' | 'heatmap';
  instant: boolean;
  range: boolean;
  legendFormat: string;
}

interface PrometheusAnnotation extends DataQuery {
  expr: string;
  interval: string;
}

type Only<T> = { [Key in keyof T as string extends Key ? never : Key]: T[Key] };
type Kind<Type extends string, Options, Custom> = Omit<
  Only<Panel>,
  'type' | 'title' | 'description' | 'options' | 'targets' | 'fieldConfig' | 'gridPos'
> & {
  type: Type;
  title: string;
  description: string;
  gridPos: { h: number; w: number; x: number; y: number };
  options: Options;
  targets: PrometheusQuery[];
  fieldConfig: Omit<FieldConfigSource, 'defaults'> & {
    defaults: Omit<FieldConfigSource['defaults'], 'custom' | 'unit'> & { unit: string; custom?: Custom };
  };
};

type AnyPanel =
  | RowPanel
  | Kind<'stat', StatOptions, never>
  | Kind<'timeseries', TimeSeriesOptions, TimeSeriesFieldConfig>
  | Kind<'heatmap', HeatmapOptions, HeatmapFieldConfig>
  | Kind<'table', TableOptions, TableFieldConfig>;

export type DashboardFile = Json<
  Omit<Dashboard, 'panels' | 'annotations'> & {
    id: null;
    uid: string;
    panels: AnyPanel[];
    annotations: { list: Array<AnnotationQuery<PrometheusAnnotation>> };
  }
>;
